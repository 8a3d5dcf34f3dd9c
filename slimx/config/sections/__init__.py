"""Sections of a configuration, one file per section or per group of related sections: keys, types, bounds and
defaults."""
