"""What developers of this repository run, most of it by the Makefile; not part of the package."""
