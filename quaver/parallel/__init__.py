"""Float8 linears and experts that tensor, sequence and expert parallelism split over ranks."""
