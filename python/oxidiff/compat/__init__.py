"""Other projects' import names, served by this package; each is installed by importing its module here."""
