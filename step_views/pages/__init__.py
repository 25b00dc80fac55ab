"""Pages: single HTML files about a recording, a prediction, a comparison, plans or a sweep."""
