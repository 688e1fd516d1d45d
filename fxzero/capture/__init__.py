"""From Dynamo's graph to a joint graph."""
