"""The plans of the recording campaigns that come with the package, one TOML file each (``tracer.campaign.plan``)."""
