"""quaver in other people's trainers: one file per library, which is imported only when that file is."""
