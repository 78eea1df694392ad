"""What a run writes down and shows: numbers, pictures, where it comes from."""
