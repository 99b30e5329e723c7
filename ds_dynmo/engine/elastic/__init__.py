"""Fewer or more ranks in mid-run: layers move off those that leave, the others go on in a world of another size."""
