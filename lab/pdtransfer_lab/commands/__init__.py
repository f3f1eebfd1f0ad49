"""The commands that this distribution adds to `pdtransfer`, each by an entry point."""
