"""A text to measure with where the user names none: an account of one night, told plainly."""

TEXT = """\
The lamp at Corran Point was lit every evening for a hundred and twelve years, and on the \
night that this account is about it was lit a little late. Marta Lindqvist, who kept it, had \
walked to the village for a gasket, and the baker had wanted to talk. By the time she had \
climbed the last of the stairs the sun was already under the water and two boats stood off the \
reef, waiting to be told where it was.

She cleaned the glass first. It is a rule of the trade that one cleans before one lights, \
since a hot lens cannot be touched until morning. Then she pumped the pressure up to where the \
needle trembled, opened the valve, and held a match to the mantle. It caught with the small \
cough that she had heard some nine thousand times. The clockwork took the weight, the lens \
began to turn, and the first beam went out over the boats, over the reef, and over a good deal \
of empty sea.

The log for that evening says: wind south-west, moderate; visibility good; barometer falling. \
It does not say that the barometer had been falling since noon, or that the gulls had come \
inland and stood in rows along the wall of the churchyard, all facing the same way. Keepers \
write down what they are asked to write down. What they think about it they tell the next \
keeper, if there is one.

At nine the wind backed to the south, and at ten it stopped. Marta went out on the gallery. \
There was no moon yet. The sea made hardly a sound against the rocks, and from the village she \
could hear somebody practising the accordion, the same four bars again and again, with the \
same mistake in the third. She counted the boats in the harbour by their riding lights and got \
eleven, which was all of them but one. The missing one was the Halcyon, a ketch of forty feet \
that belonged to two brothers named Ferrante, who fished for crab on the far side of the bank \
and were known to stay out longer than they had said.

She went in and wrote: ten o'clock, calm, Halcyon not in.

A calm of that kind does not last. People who live inland suppose that storms begin with wind, \
but a storm that comes over the sea begins with its absence, because the air is being drawn \
off to where it will be needed. Marta put the shutters up on the weather side, filled the \
second tank, and carried the cat, which had been asleep in the oil store, up to the watch \
room. The cat went under the table and stayed there. It was, she used to say afterwards, the \
better instrument of the two.

The wind came back at twenty minutes to eleven, from the north-west, all at once. It struck \
the tower with a noise like a cart of gravel being tipped. The flame bent over, straightened, \
and bent again. For about a quarter of an hour the only thing to do was to stand with one hand \
on the valve and give it a little more when it sank and a little less when it roared. Salt had \
covered the panes so thickly by then that the beam, seen from the water, must have been a \
brown stain rather than a light. She knew that. There was no way to clean the outside of the \
glass in such a wind without being blown off the gallery, and the rules forbade it.

At eleven she saw a lantern, low down, to the west of the reef, where no lantern ought to be.

It was swinging too quickly for a ketch. It took her some time to understand that she was \
looking at a dinghy: the brothers had lost the Halcyon, or left her, and were trying to row in \
with the wind behind them. They could not see the gap. From a boat so small, in such water, \
one sees the next wave and nothing else. If they came on as they were heading they would be on \
the outer ledge within ten minutes.

There is a passage in the keeper's manual, under the heading of signals, that says a light \
must never be altered, shaded or put out for any reason while vessels are at sea, for a light \
that changes is worse than none. Marta had read it aloud to three assistants. She now took the \
wrench from its hook, stopped the clockwork, and turned the lens by hand until the beam lay \
flat across the gap like a plank. Then she took a wet sack and covered the lamp, and took it \
away, and covered it again: three short, one long, as the brothers' father used to do with his \
torch from the end of the jetty when it was time to come home for supper.

She did not know whether they would remember. The elder was fifty-one. She went on for as long \
as her arms would let her, and then for a while longer, and she did not look out of the \
window, because she needed to count.

When the door at the foot of the tower banged, she thought that the wind had broken it. Then \
she heard them on the stairs, two pairs of boots, very slow. The younger one had lost a tooth \
and had somebody else's hat on. He sat down on the coal box, looked at the lens, which was \
still standing with its bright eye fixed upon the gap, and said that he supposed it would have \
to be reported.

It was reported. An inspector came out in the spring, a courteous man with a cold, and \
examined the gears, the log, and the sack, which had a hole burnt in it. He asked why the \
entry for eleven o'clock was in pencil. She told him that the ink had been spilt by the cat. \
He considered this for some time. In the end he wrote that the apparatus at Corran Point had \
been found to be stiff, that it had been out of motion for a period of thirty minutes owing to \
the state of the weather, and that a new gasket was recommended.

The gasket is in the museum at Dunmore now, in a case with the hat. The lamp was replaced by \
an electric one, and the electric one by a mast with a panel on it that needs no one at all. \
But if you ask in the village how to find the gap in bad weather, they will still tell you the \
old way: keep the church behind you, keep the wind on your left cheek, and look for three \
short and one long.
"""
