// Package examples is the module of the programs that show refill at work. It holds no code of its own.
//
//   - quickstart: three nodes through an expiry, a slow database and a failing one, without refill and with it.
package examples
