"""One model on several processes: its weights divided, its sums reduced, its steps led by one of them."""
