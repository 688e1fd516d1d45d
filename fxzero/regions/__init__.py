"""Where a graph is cut into regions, what makes two of them alike, and what they become."""
