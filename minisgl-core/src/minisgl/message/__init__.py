"""The messages between processes, their codec and ZMQ queues."""
