"""Work that is done within bounds, in processes that are killed over them."""
