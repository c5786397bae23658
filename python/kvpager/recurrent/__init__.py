"""States of recurrent layers: where a text stands, what is kept, and how it is saved."""
