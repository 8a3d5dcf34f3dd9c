"""The plan of a publication: which bytes go where, in which precision."""
