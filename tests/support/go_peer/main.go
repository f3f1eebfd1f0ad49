// A peer's decoder and encoder: for each line of hex it prints what the frame is, and the frame that it would write.
package main

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"os"

	"peer/pdtransfer"
)

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20)
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	for lines.Scan() {
		frame, err := hex.DecodeString(lines.Text())
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		message, err := pdtransfer.Decode(frame)
		var refused *pdtransfer.FieldError
		switch {
		case errors.As(err, &refused):
			fmt.Fprintln(out, "refused", refused.Field)
		default:
			fmt.Fprintln(out, message.Name(), hex.EncodeToString(pdtransfer.Encode(message)))
		}
	}
}
