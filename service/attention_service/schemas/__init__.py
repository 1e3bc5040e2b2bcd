"""What the API promises: requests, answers and problems as pydantic models. Arrays in them are ndarrays."""
