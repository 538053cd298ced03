"""What a run will need and how long its iterations will take, before there is an allocation."""
