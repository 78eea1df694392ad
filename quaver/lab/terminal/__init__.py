"""Text, tables and progress that commands show in a terminal."""
