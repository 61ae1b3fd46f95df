"""Many requests on one session: places, deadlines, cancellation, and the thread that runs the steps."""
