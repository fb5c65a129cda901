"""SVG and HTML of reports: marks, colours, the page around them."""
