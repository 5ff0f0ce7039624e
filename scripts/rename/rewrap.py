"""Rewrap paragraphs of a markdown page that hold a line of over 120 characters (not tables, not code)."""
import re, sys, textwrap
for f in sys.argv[1:]:
    lines=open(f).read().split('\n'); out=[]; i=0; code=False
    while i<len(lines):
        l=lines[i]
        if l.startswith('```'): code=not code
        if code or not l.strip() or l.startswith(('|','#','```','    ','<')):
            out.append(l); i+=1; continue
        m=re.match(r'( *)([-*] |\d+\. )?',l); ind=m[1]; mark=m[2] or ''
        j=i+1; sub=ind+' '*len(mark)
        while j<len(lines) and lines[j].strip() and not re.match(r' *([-*] |\d+\. )|[|#`<]',lines[j]) and (lines[j].startswith(sub) if sub else not lines[j].startswith('    ')): j+=1
        para=lines[i:j]
        if any(len(x)>120 for x in para):
            t=' '.join(x.strip() for x in para)
            para=textwrap.wrap(t,120,initial_indent=ind,subsequent_indent=sub,break_long_words=False,break_on_hyphens=False)
        out+=para; i=j
    s='\n'.join(out)
    open(f,'w').write(s)
