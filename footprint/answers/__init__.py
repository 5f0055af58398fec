"""What is known of a step as tables, JSON, pictures and a page."""
