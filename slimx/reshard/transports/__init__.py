"""Host memory and GPU memory that the processes of one machine share to exchange buckets."""
