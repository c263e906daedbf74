"""What models cost, what they attend to, and how sure a measured difference is."""
