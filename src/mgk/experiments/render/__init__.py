"""Tables, figures, HTML pages and Markdown sections, made from results."""
