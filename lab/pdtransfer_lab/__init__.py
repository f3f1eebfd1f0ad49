"""What measures, sizes, attacks and models pdtransfer: the commands bench, plan and replay."""
