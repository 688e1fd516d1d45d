"""What both doors share: decisions and the plans that hold them."""
