"""Plan cache: signatures that name a job, and the store of plans under them."""
