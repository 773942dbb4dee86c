"""The verbs of this package: one file each, imported when it is used."""
