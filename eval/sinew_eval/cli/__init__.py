"""Commands of this package, one file each. A file is imported when its command is used."""
