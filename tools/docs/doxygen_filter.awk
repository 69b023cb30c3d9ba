# Doxygen's filter for headers. The comment that a file begins with becomes the page's text, as it is; what
# is private is left out, because Doxygen links to private nested classes without describing them.
BEGIN { opening = 1 }
opening && /^\/\// {
  sub(/^\/\/ ?/, "")
  if (NR == 1) print "/** \\file\n\\brief " $0 "\n\\verbatim"
  else print
  next
}
opening { opening = 0; if (NR > 1) print "\\endverbatim */" }
/^ private:/ { hidden = 1 }
/^ (public|protected):/ || /^};/ { hidden = 0 }
!hidden { print }
