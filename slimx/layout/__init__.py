"""The algebra of weight layouts: index maps, tables of them, and the ranks that hold their parts."""
