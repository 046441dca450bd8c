"""The engines: a trace, a policy and a machine's costs in, a log of decisions and times out."""
