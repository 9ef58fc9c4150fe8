"""What two ranks compute together is what one process computes alone, or ends in a reason."""
