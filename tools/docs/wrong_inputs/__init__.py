"""Wrong inputs that new users type, by what they concern, in the order of tests/golden/mistakes.txt."""
