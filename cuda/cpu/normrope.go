package cpu

import "github.com/draftscope/draftscope/cuda"

// NormRoPE implements [cuda.Device], with the bits of RMSNorm and then RoPE.
func (d *Device) NormRoPE(dst cuda.Tensor, args cuda.NormRoPEArgs) error {
	if err := args.Check(dst); err != nil {
		return err
	}
	var out, in, weight matrix
	if err := views("normrope", operand{dst, &out}, operand{args.X, &in}, operand{args.W, &weight}); err != nil || in.rows == 0 {
		return err
	}
	dim, scale := args.HeadDim, gains(weight.row(0), args.Gain)
	table := d.rotations(args.Pos, args.Rotary, args.Theta)
	d.rows(in.rows, out.cols*4, func(lo, hi int) {
		for t := lo; t < hi; t++ {
			from, to := in.row(t), out.row(t)
			for h := range args.Heads {
				head := to[h*dim : (h+1)*dim]
				rmsnorm(head, from[h*args.Step:][:dim], scale, args.Eps)
				table.turn(head, t)
			}
		}
	})
	return nil
}
