"""How an item, or an error, crosses a process boundary."""
