"""The documentation: pages that are made of the code, and outputs that are made by running it."""
