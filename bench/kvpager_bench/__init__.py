"""How fast kvpager is, and beside what: the suite behind `kvpager bench`."""
