"""What ranks are to each other: groups, what each one runs, who is lost, where one waits."""
