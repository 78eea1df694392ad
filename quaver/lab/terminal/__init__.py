"""What commands show in a terminal: text, tables, and what they are doing."""
