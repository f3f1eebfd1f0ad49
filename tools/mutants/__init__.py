"""Small breaks of the product's code, one at a time, and those among them that no test notices."""
