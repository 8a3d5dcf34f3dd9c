"""Plans of publications and exports: which bytes are copied from which rank to which, and in which dtype."""
