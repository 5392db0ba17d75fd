"""Device code that several ops share. Imported only while a kernel is traced; there is no torch here."""
