"""What quaver recognizes of other libraries, without importing them: one file per library."""
