// Nothing: what the target ladon_test_headers compiles is the headers that the tests share.
