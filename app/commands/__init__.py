"""What the `membound` command offers, group by group, and how its answers read in a terminal."""
