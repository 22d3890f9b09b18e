"""Planning: how many requests of what length a machine carries, what binds, what would help. Loads no torch."""
