"""Self-contained HTML pages: text, tables, charts and pictures in one file that needs no network."""
