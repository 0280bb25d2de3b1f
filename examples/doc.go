// Package examples is the module of the example programs. The package itself contains no code.
//
//   - quickstart compares three nodes without refill and three nodes with refill. The scenes are an expiry, a slow
//     database and a failing database.
package examples
