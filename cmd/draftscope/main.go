// Command draftscope records what a target model computes, replays it through
// speculative-decoding drafters, and answers which drafter is better, and
// where. Run "draftscope help" for the commands.
package main

import (
	"context"
	"os"
)

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}
