"""What drafters and heads share: lessons, losses, the loop, acceptance, the report."""
